"""Requests, state, sampling, the token loop (`sequence.py`), and the budget that all of it must keep (`plan.py`)."""
