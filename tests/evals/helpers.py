import numpy as np

from vit_jax.data.sources import Source


def make_source(names=(), class_names=None, class_ids=None):
    """Returns a source of images with these names, each 200x100 and filled with its number, of classes with names."""
    class_names, class_ids = (classes and tuple(classes) for classes in (class_names, class_ids))
    return Source(
        "test",
        (("test", range(len(names))),),
        read_example=lambda split, row: (np.full((200, 100, 3), row, np.uint8), 0),
        num_classes=len(class_names or class_ids or [0]),
        class_names=class_names,
        class_ids=class_ids,
        read_name=lambda split, row: names[row],
    )
