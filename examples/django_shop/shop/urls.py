"""POST /orders/ and GET /orders/7/."""

from django.urls import path

from shop.views import place, show

urlpatterns = [path("orders/", place), path("orders/<int:order>/", show)]
