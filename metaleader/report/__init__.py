"""Figures, tables and pages made from the records of a run."""
