"""`manage.py test`: jobs are in Django's test database, and gone with each test's transaction."""

from django.test import TestCase, TransactionTestCase

from shop.models import Order, Payment
from shop.tasks import charge
from tenure.integrations.django import app
from tenure.testing import assert_enqueued, drain


class Placing(TestCase):
    def test_an_order_is_stored_with_its_job(self) -> None:
        order = self.client.post("/orders/", {"cents": 1999}).json()["order"]
        self.assertEqual(Order.objects.get(id=order).state, "new")

    def test_a_refused_order_leaves_no_job(self) -> None:
        self.assertEqual(self.client.post("/orders/", {"cents": 0}).status_code, 400)

    def tearDown(self) -> None:
        """What the test's transaction holds is not stored for others."""
        self.assertEqual(list(app.find()), [])


class Charging(TransactionTestCase):
    """What a worker is to see has to be committed."""

    def test_it_is_paid_once(self) -> None:
        order = self.client.post("/orders/", {"cents": 1999}).json()["order"]
        assert_enqueued(app, charge, args={"order": order})
        drain(app)
        self.assertEqual(self.client.get(f"/orders/{order}/").json(), {"state": "paid"})
        self.assertEqual(Payment.objects.get(order_id=order).cents, 1999)
        self.assertEqual([job.status for job in app.find()], ["completed", "completed"])
