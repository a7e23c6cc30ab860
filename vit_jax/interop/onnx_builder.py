"""The nodes and constants of an ONNX graph under construction."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from vit_jax import UserError

SMALL = 1024  # bytes of a constant that stays in the file

Arrays: TypeAlias = dict[str, Any]  # the parameters of a module, nested as they are in the model
Value: TypeAlias = Any  # of the graph: an `onnx_ir.Value`


class Graph:
    """The nodes and constants of a graph under construction.

    Attributes:
        dtype: float32 or float16, of the constants that are added next.
        nodes: the nodes, in their order.
        constants: the constants, each once.
    """

    def __init__(self, ir: ModuleType, dtype: str):
        self._ir, self.dtype = ir, dtype
        self.nodes: list[Any] = []
        self.constants: list[Value] = []

    def constant(self, array: Any) -> Value:
        """Returns a constant; floating-point numbers are cast to `dtype`.

        Raises:
            UserError: a value is beyond the range of the dtype.
        """
        array = np.asarray(array)
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):
                cast = array.astype(self.dtype)
            if (np.isinf(cast) & np.isfinite(array)).any():
                raise UserError(f"a weight is beyond the range of {self.dtype}; write the file in float32.")
            array = cast
        number = f"c{len(self.constants)}"
        tensor = self._ir.tensor(np.asarray(array, order="C"), name=number)
        value = self._ir.Value(
            name=number, type=self._ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
        )
        self.constants.append(value)
        return value

    def many(self, kind: str, count: int, *inputs: Any, **attributes: Any) -> list[Value]:
        """Returns the outputs of a new node. Arrays and numbers among the inputs become constants."""
        values = [one if isinstance(one, self._ir.Value) else self.constant(one) for one in inputs]
        node = self._ir.node(kind, values, attributes, num_outputs=count, name=f"{kind}_{len(self.nodes)}")
        for number, value in enumerate(node.outputs):
            value.name = f"v{len(self.nodes)}_{number}"
        self.nodes.append(node)
        return list(node.outputs)

    def __getattr__(self, kind: str) -> Callable[..., Value]:
        """Returns the function that adds a node of this kind and returns its only output."""
        return lambda *inputs, **attributes: self.many(kind, 1, *inputs, **attributes)[0]

    def cast(self, x: Value) -> Value:
        """Returns `x` in `dtype`."""
        return self.Cast(x, to=int(self._ir.DataType[self.dtype.replace("float32", "float").upper()]))

    def reshape(self, x: Value, *shape: int) -> Value:
        """Returns `x` in another shape, in which 0 stands for the size that it has there, and -1 for the rest."""
        return self.Reshape(x, np.array(shape, np.int64))

    def output(self, x: Value, name: str, shape: tuple[int, ...]) -> Value:
        """Returns `x` as a float32 output of the graph, with this shape of each image's part."""
        self.dtype = "float32"
        value = self.cast(x)
        value.name, value.type = name, self._ir.TensorType(self._ir.DataType.FLOAT)
        value.shape = self._ir.Shape(("batch", *shape))
        return value

    def move_beside(self, name: str) -> list[bytes]:
        """Replaces weights by references to a file `name`, and returns what that file contains.

        Small constants stay, since runtimes read shapes among them before they read other files.
        """
        chunks, offset = [], 0
        for value in self.constants:
            tensor, content = value.const_value, value.const_value.tobytes()
            if len(content) < SMALL:
                continue
            value.const_value = self._ir.ExternalTensor(
                name, offset, len(content), tensor.dtype, shape=tensor.shape, name=value.name
            )
            chunks.append(content)
            offset += len(content)
        return chunks

    def dense(self, x: Value, kernel: Any, bias: Any = None) -> Value:
        """Returns `x @ kernel + bias`; the kernel is [inputs, outputs], or several dimensions of each as in `Dense`."""
        product = self.MatMul(x, kernel)
        return product if bias is None else self.Add(product, np.reshape(bias, -1))

    def norm(self, x: Value, arrays: Arrays, epsilon: float) -> Value:
        """Returns the norm of the last dimension: LayerNorm, or RMSNorm where there is no bias."""
        if "bias" in arrays:
            return self.LayerNormalization(x, arrays["scale"], arrays["bias"], axis=-1, epsilon=epsilon)
        mean = self.ReduceMean(self.Mul(x, x), np.array([-1]), keepdims=1)
        return self.Mul(self.Div(x, self.Sqrt(self.Add(mean, epsilon))), arrays["scale"])
