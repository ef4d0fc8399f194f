"""Recurrent states: their layouts, their slots, and pools that they share with pages."""
