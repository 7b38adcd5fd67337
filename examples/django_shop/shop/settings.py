"""Jobs are in DATABASES["default"], beside the orders: that is all there is to configure."""

import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent
FILE = Path(os.environ.get("SHOP_FILE") or BASE_DIR / "shop.sqlite3")

SECRET_KEY = os.environ.get("SHOP_SECRET_KEY") or "only for this example"
DEBUG = True
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "testserver"]
INSTALLED_APPS = ["tenure.integrations.django", "shop"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True

if name := os.environ.get("SHOP_POSTGRES"):
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": name,
            "HOST": os.environ.get("PGHOST", ""),
            "PORT": os.environ.get("PGPORT", ""),
            "USER": os.environ.get("PGUSER", ""),
            "PASSWORD": os.environ.get("PGPASSWORD", ""),
            "CONN_MAX_AGE": 60,
        }
    }
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": FILE,
            # A transaction that reads, then writes, must have begun as a writer.
            "OPTIONS": {"transaction_mode": "IMMEDIATE"},
            # Workers cannot look into the memory of a test.
            "TEST": {"NAME": FILE.with_name(f"test-{FILE.name}")},
        }
    }
