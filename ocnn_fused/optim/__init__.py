"""Optimisers whose updates are orthogonal."""
