"""The scikit-learn estimator: rows, images or photo files with some labels in; seen classes and new groups out.

`classifier.OpenWorldClassifier`  the estimator
`labels.encode_labels`            y as people have it; labels for new groups
`samples.read_samples`            X as people have it: rows, sparse rows, images, photo files
`groups`                          what can be asked about groups: typical rows, a tree, how stable they are, a picture
"""

from opencon.estimator.classifier import OpenWorldClassifier
from opencon.estimator.samples import DiscoveryWarning, InputError, ParameterError

__all__ = ["DiscoveryWarning", "InputError", "OpenWorldClassifier", "ParameterError"]
