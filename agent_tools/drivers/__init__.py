"""Drivers of an alignment: the autopilot, which follows rules. One file per driver."""
