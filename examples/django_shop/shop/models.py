"""Orders and their payments: an order can be paid once."""

from django.db import models


class Order(models.Model):
    id = models.BigAutoField(primary_key=True)
    cents = models.IntegerField()
    state = models.CharField(max_length=20, default="new")


class Payment(models.Model):
    id = models.BigAutoField(primary_key=True)
    order = models.OneToOneField(Order, on_delete=models.CASCADE)
    cents = models.IntegerField()
