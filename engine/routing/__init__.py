"""Deciding where each token goes: which experts, which replica, hence which device."""
