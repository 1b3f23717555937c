"""How close generated images are to real ones: FID, sFID, Inception score, precision, recall; and without any weights
from outside, the Fréchet distance in the features of a small classifier.

fidelity = ClassifierFidelity(open_images("digits", "train"))
fidelity(samples, labels)                      # {"frechet": …, "accuracy": …}
"""

from siamesenorm.tasks.fidelity.sampled import ClassifierFidelity
from siamesenorm.tasks.fidelity.statistics import Gaussian, Moments, frechet_distance

__all__ = ["ClassifierFidelity", "Gaussian", "Moments", "frechet_distance"]
