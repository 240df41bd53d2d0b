"""The tests. Every process of a test imports this."""

import tests.helpers.offloaded  # noqa: F401
