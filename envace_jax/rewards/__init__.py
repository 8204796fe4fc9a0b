"""Checklists, judges and rule verifiers."""
