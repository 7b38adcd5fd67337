"""Take orders, and say how they are doing."""

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt

from shop.models import Order
from shop.tasks import charge


@csrf_exempt
def place(request: HttpRequest) -> JsonResponse:
    with transaction.atomic():  # the order and its job: both, or neither
        order = Order.objects.create(cents=int(request.POST["cents"]))
        charge.enqueue(order.id)
        if order.cents <= 0:
            transaction.set_rollback(True)
            return JsonResponse({"error": "nothing to pay"}, status=400)
    return JsonResponse({"order": order.id}, status=202)


def show(request: HttpRequest, order: int) -> JsonResponse:
    return JsonResponse({"state": get_object_or_404(Order, id=order).state})
