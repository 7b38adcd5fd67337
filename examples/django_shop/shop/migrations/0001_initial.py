"""Orders and payments."""

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(primary_key=True)),
                ("cents", models.IntegerField()),
                ("state", models.CharField(default="new", max_length=20)),
            ],
        ),
        migrations.CreateModel(
            name="Payment",
            fields=[
                ("id", models.BigAutoField(primary_key=True)),
                ("order", models.OneToOneField(on_delete=models.CASCADE, to="shop.order")),
                ("cents", models.IntegerField()),
            ],
        ),
    ]
