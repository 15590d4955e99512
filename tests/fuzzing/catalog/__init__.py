"""The templates: ops with a rule, ops without, the public API in all its forms, and what is done to variables."""

from tests.fuzzing.catalog import api, control, ruled, sizes, unruled, unruled_data, variables
from tests.fuzzing.templates import templates_in

SOURCES = {
    "ruled": ruled.TABLE,
    "unruled": unruled.TABLE + unruled_data.TABLE,
    "api": api.TABLE,
    "control": control.TABLE,
    "variables": variables.TABLE,
    "sizes": sizes.TABLE,
}
CATALOG = {name: templates_in(table) for name, table in SOURCES.items()}

__all__ = ["CATALOG"]
