"""Formats x methods on one model: what each costs, in one table and one plot."""
