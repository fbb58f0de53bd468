"""Linear models by exact steps from public rows, with the conventions of scikit-learn."""

from halfsilver.linear_model.logistic import MirrorLogisticRegression
from halfsilver.linear_model.public_transformer import PublicTransformer
from halfsilver.linear_model.regression import MirrorLinearRegression

__all__ = ["MirrorLinearRegression", "MirrorLogisticRegression", "PublicTransformer"]
