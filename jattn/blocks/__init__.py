"""Functional block tables and the planning of pages."""
