#!/usr/bin/env python
"""A Django project with background jobs, on SQLite or PostgreSQL.

    cd examples/django_shop
    python manage.py migrate              # Django's tables, and Tenure's beside them
    python manage.py runserver            # curl -X POST -d cents=1999 localhost:8000/orders/
    python manage.py tenure worker        # in another terminal
    python manage.py test

SHOP_POSTGRES=shop uses that database of the server that PGHOST, PGPORT, PGUSER and PGPASSWORD name.
"""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)
