"""The phone artifact: two graphs of fixed shape a part, prefill and decode, that share their weights' file."""
