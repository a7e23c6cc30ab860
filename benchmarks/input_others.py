"""The readers that `benchmarks.input` compares ours with; runs in an environment with tensorflow and timm.

Arguments are `tf.data` or `timm`, and the path of a plan, a JSON file with the paths of files, boxes (top, left,
height, width), size and batch. Each line of the input is answered by a line of JSON. The answer to `round` is the
processor seconds of one pass, the answer to `pixels` the first 16 images.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def tensorflow_batches(plan: dict[str, Any]) -> Callable[[], Any]:
    """Returns a function that starts a pass over the batches of tf.data, used as the authors use it.

    Only the crop is decoded. It is resized without antialias and truncated to uint8.
    """
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)

    def read(path, box):
        image = tf.image.decode_and_crop_jpeg(tf.io.read_file(path), box, channels=3)
        return tf.cast(tf.image.resize(image, [plan["size"]] * 2), tf.uint8)

    options = tf.data.Options()
    options.threading.private_threadpool_size = options.threading.max_intra_op_parallelism = 1
    data = tf.data.Dataset.from_tensor_slices((plan["files"], np.array(plan["boxes"], np.int32)))
    data = data.map(read).batch(plan["batch"]).with_options(options)
    return lambda: data.as_numpy_iterator()


def timm_batches(plan: dict[str, Any]) -> Callable[[], Any]:
    """Returns a function that starts a pass over the batches of timm's dataset, crop and loader, without workers.

    Only the boxes of the crops are given by the plan.
    """
    import torch
    from timm.data import ImageDataset
    from timm.data.loader import fast_collate
    from timm.data.transforms import RandomResizedCropAndInterpolation, ToNumpy
    from torchvision.transforms import Compose

    torch.set_num_threads(1)

    class CropAtBoxes(RandomResizedCropAndInterpolation):
        """timm's crop, with the boxes of the plan one after the other."""

        def get_params(self, image, scale, ratio):
            return tuple(next(self.boxes))

    crop = CropAtBoxes(plan["size"])

    class Reader:
        """The interface through which timm's dataset reads files."""

        def __getitem__(self, number):
            return open(plan["files"][number], "rb"), 0

        def __len__(self):
            return len(plan["files"])

    dataset = ImageDataset(root="", reader=Reader(), transform=Compose([crop, ToNumpy()]))

    def batches():
        crop.boxes = iter(plan["boxes"])
        loader = torch.utils.data.DataLoader(dataset, plan["batch"], shuffle=False, collate_fn=fast_collate)
        return ((images.numpy().transpose(0, 2, 3, 1)) for images, _ in loader)

    return batches


def main(name: str, plan_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    batches = {"tf.data": tensorflow_batches, "timm": timm_batches}[name](plan)
    for line in sys.stdin:
        if line.strip() == "pixels":
            print(json.dumps(next(iter(batches()))[:16].tolist()), flush=True)
            continue
        began, count = time.process_time(), 0
        for batch in batches():
            count += len(batch)
        seconds = time.process_time() - began
        assert count == len(plan["files"])
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
