"""Attacks: power losses, faults and kills, each repeated. docs/reliability.md has their table."""
