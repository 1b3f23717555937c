"""Labelled images: sources, augmentation, batches.

from siamesenorm.data.images import open_images
images = open_images("digits", "train")
images[0], images.label(0), images.class_names, images.fingerprint
"""

from siamesenorm.data.images.imageset import ArrayImages, ImageSet
from siamesenorm.data.images.opening import open_images

__all__ = ["ArrayImages", "ImageSet", "open_images"]
