"""``smart-infinity selftest`` and ``card-report``: the commands for SmartSSDs."""
