"""Measuring lean and its peers side by side. May import anything; nothing imports it."""
