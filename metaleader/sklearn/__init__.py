"""Estimators for scikit-learn: rows that belong to groups, each with few rows."""

from metaleader.sklearn.estimators import MetaClassifier, MetaRegressor

__all__ = ["MetaClassifier", "MetaRegressor"]
