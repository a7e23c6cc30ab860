"""Labels that VTAB makes from what the records of its data sets state, as its authors' code (task_adaptation) does.

Each function takes a feature of a TFDS record: `objects`, a dict of arrays with a row for each object, or a number.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

Objects: TypeAlias = Mapping[str, Any]

MIN_OBJECTS = 3  # in an image of CLEVR
CLEVR_DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_DISTANCES = (-100.0, 8.0, 20.0, 999.0)  # meters; the last class has no vehicle
NO_VEHICLE = 1000.0
VEHICLES = 3  # the first types of objects of KITTI: car, van, truck
BINS = 16  # of the positions and orientations of dSprites


def count_objects(objects: Objects) -> int:
    """Returns the number of objects in an image of CLEVR, less the fewest that an image has: 0 to 7."""
    return len(objects["size"]) - MIN_OBJECTS


def bin_object_distance(objects: Objects) -> int:
    """Returns the bin, 0 to 5, of the distance from the camera to the nearest object in an image of CLEVR."""
    return find_bin(float(np.asarray(objects["pixel_coords"])[:, 2].min()), CLEVR_DISTANCES)


def bin_vehicle_distance(objects: Objects) -> int:
    """Returns the bin, 0 to 3, of the distance along the view to the nearest vehicle of KITTI; 3 if there is none."""
    types = np.asarray(objects["type"])
    depths = np.asarray(objects["location"], np.float32).reshape(len(types), 3)[types < VEHICLES, 2]
    return find_bin(float(depths.min(initial=NO_VEHICLE)), KITTI_DISTANCES)


def bin_position(label: Any) -> int:
    """Returns the bin, 0 to 15, of one of the 32 horizontal positions of dSprites; a bin has two positions."""
    return int(label // (32 / BINS))


def bin_orientation(label: Any) -> int:
    """Returns the bin, 0 to 15, of one of the 40 orientations of dSprites; bins have three and two in turn."""
    return int(label // (40 / BINS))


def find_bin(value: float, bounds: Sequence[float]) -> int:
    """Returns the number of the last bound that is less than a value; a value on a bound is in the bin below it."""
    return int(np.searchsorted(bounds, value, side="left")) - 1


LABELS: Mapping[str, Callable[[Any], int]] = {
    "class": int,
    "count_objects": count_objects,
    "bin_object_distance": bin_object_distance,
    "bin_vehicle_distance": bin_vehicle_distance,
    "bin_position": bin_position,
    "bin_orientation": bin_orientation,
}
