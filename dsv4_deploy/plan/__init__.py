"""ServingSpec + Facts -> Plan: the one place that knows a flag or a variable, and why it is set."""
