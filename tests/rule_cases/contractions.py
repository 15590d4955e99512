"""Cases of matrix products, einsum, convolutions and their gradients."""

import numpy as np
import tensorflow as tf

from tests.rule_cases.table import add, call, case, ints

case("MatMul", "b4", "43")
case("MatMul", "b4", "34", transpose_b=True)
case("MatMul", "4b", "43", transpose_a=True)
case("MatMul", "34", "4b")
case("MatMul", "34", "b4", transpose_b=True)
case("MatMul", "3b", "b4")
case("MatMul", "b3", "b4", transpose_a=True)
case("MatMul", "3b", "4b", transpose_b=True)
case("MatMul", "b3", "4b", transpose_a=True, transpose_b=True)
case("MatMul", "3b", "B4")
case("MatMul", "+34", "42")
case("MatMul", "34", "+42")
# Every row with every row: one operand stays cut, the other is gathered.
add("MatMul", lambda rows, x: call("MatMul", x, x, transpose_b=True), ["b3"])
add("MatMul", lambda rows, x, y: call("MatMul", x, y), ["b4", "4b"])

_PLACES = np.array([[0, 1], [2, 0], [2, 2], [3, 1]])  # of the entries of a 4 x 3 matrix
case("SparseTensorDenseMatMul", _PLACES, "4", [4, 3], "3b")
case("SparseTensorDenseMatMul", _PLACES, "4", [4, 3], "b3", adjoint_b=True)
case("SparseTensorDenseMatMul", _PLACES, "4", [4, 3], "4b", adjoint_a=True)
case("SparseTensorDenseMatMul", _PLACES, "+4", [4, 3], "32")
case("SparseTensorDenseMatMul", _PLACES, "4", [4, 3], "+32")
_EDGES = ints(4, dtype=np.int64)("b2")
case("SparseTensorDenseMatMul", _EDGES, "b", [4, 4], "43")
case("SparseTensorDenseMatMul", _EDGES, "b", [4, 4], "34", adjoint_a=True, adjoint_b=True)

for _type in ["BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"]:
    _more = {"Tout": tf.float64} if _type == "BatchMatMulV3" else {}
    case(_type, "b34", "b42", **_more)
    case(_type, "2b34", "2b42", **_more)
    case(_type, "3b4", "342", **_more)
    case(_type, "34b", "3b2", **_more)
    case(_type, "3b4", "3b2", adj_x=True, **_more)
    case(_type, "34b", "32b", adj_y=True, **_more)
    case(_type, "b43", "b24", adj_x=True, adj_y=True, **_more)
    case(_type, "+234", "243", **_more)
    case(_type, "234", "+243", **_more)
for _type in ["BatchMatMulV2", "BatchMatMulV3"]:
    _more = {"Tout": tf.float64} if _type == "BatchMatMulV3" else {}
    case(_type, "b34", "42", **_more)
    case(_type, "34", "b42", **_more)
    case(_type, "b134", "1242", **_more)
    case(_type, "1234", "b142", **_more)

case("Einsum", ["b4", "43"], equation="bi,io->bo")
case("Einsum", ["b4", "b3"], equation="bi,bo->io")
case("Einsum", ["4b3", "4b3"], equation="hqd,hkd->hqk")
case("Einsum", ["b234", "b534"], equation="bqhd,bkhd->bhqk")
case("Einsum", ["b234", "43"], equation="...i,io->...o")
case("Einsum", ["b234", "b234"], equation="b...i,b...o->bio...")
case("Einsum", ["4b", "b24"], equation="...b,b...->b...")
case("Einsum", ["b134", "b214"], equation="...ij,...kj->...ik")
case("Einsum", ["34", "b42"], equation="...ij,...jk->...ik")
case("Einsum", ["b3"], equation="bi->i")
case("Einsum", ["b3"], equation="bi->ib")
case("Einsum", ["3b4"], equation="abc->ca")
case("Einsum", ["b33"], equation="bii->bi", expect={"at_home": 1, "answered": False})
case("Einsum", ["+34", "42"], equation="ab,bc->ac")
case("Einsum", ["24", "+45"], equation="ab,bc->ca")

_IMAGE = {"strides": [1, 2, 2, 1], "padding": "SAME"}
_VALID = {"strides": [1, 1, 1, 1], "padding": "VALID"}
_VOLUME = {"strides": [1, 1, 2, 2, 1], "padding": "SAME"}
for _type in ["Conv2D", "Conv", "DepthwiseConv2dNative"]:
    case(_type, "b562", "3323", **_IMAGE)
    case(_type, "b562", "3323", **_VALID)
    case(_type, "+1462", "3323", **_VALID)
    case(_type, "1462", "+3322", **_VALID)
case("Conv2D", "b562", "3323", strides=[1] * 4, padding="EXPLICIT", explicit_paddings=[0, 0, 1, 0, 2, 1, 0, 0])
case("Conv2D", "b562", "3323", strides=[1] * 4, padding="SAME", dilations=[1, 2, 2, 1])
case("Conv2D", "256b", "33b3", **_IMAGE)  # channels that are read, and made
case("Conv2D", "2562", "332b", **_IMAGE)
case("Conv2D", "b56B", "331B", **_IMAGE)  # a group for each of so many channels
case("Conv3D", "2456b", "233b3", **_VOLUME)
case("Conv", "b4562", "23323", **_VOLUME)
case("Conv3D", "b4562", "23323", **_VOLUME)
case("Conv3D", "+13452", "23322", strides=[1] * 5, padding="VALID")
case("Conv3D", "13452", "+23322", strides=[1] * 5, padding="VALID")


def _sizes(*shape: int):
    return lambda rows: [rows, *shape]


_ONE = {"strides": [1, 1, 1, 1], "padding": "VALID"}
for _type, _out in [("Conv2D", 3), ("DepthwiseConv2dNative", 6)]:
    case(f"{_type}BackpropInput", _sizes(5, 6, 2), "3323", f"b33{_out}", **_IMAGE)
    case(f"{_type}BackpropInput", [1, 3, 3, 2], "1123", f"+133{_out}", **_ONE)
    case(f"{_type}BackpropInput", [1, 3, 3, 2], "+3323", f"111{_out}", **_ONE)
    case(f"{_type}BackpropFilter", "b562", [3, 3, 2, 3], f"b33{_out}", **_IMAGE)
    case(f"{_type}BackpropFilter", "b562", [3, 3, 2, 3], f"B33{_out}", **_IMAGE)
    case(f"{_type}BackpropFilter", "+1462", [1, 1, 2, 3], f"146{_out}", **_ONE)
    case(f"{_type}BackpropFilter", "1462", [1, 1, 2, 3], f"+146{_out}", **_ONE)
case("Conv2DBackpropInput", [5, 6], "3323", "b333", **_IMAGE)
case("Conv2DBackpropInput", [2, 5, 6, 2], "332b", "233b", **_IMAGE)
case("Conv2DBackpropInput", lambda rows: [2, 5, 6, rows], "33b3", "2333", **_IMAGE)
case("Conv2DBackpropFilter", "256b", lambda rows: [3, 3, rows, 3], "2333", **_IMAGE)
case("Conv2DBackpropFilter", "2562", lambda rows: [3, 3, 2, rows], "233b", **_IMAGE)
case("Conv3DBackpropInputV2", _sizes(4, 5, 6, 2), "23323", "b4333", **_VOLUME)
_ONE = {"strides": [1] * 5, "padding": "VALID"}
case("Conv3DBackpropInputV2", [1, 3, 3, 3, 2], "11123", "+13333", **_ONE)
case("Conv3DBackpropInputV2", [1, 3, 3, 3, 2], "+33323", "11113", **_ONE)
case("Conv3DBackpropFilterV2", "b4562", [2, 3, 3, 2, 3], "b4333", **_VOLUME)
case("Conv3DBackpropFilterV2", "+13332", [1, 1, 1, 2, 3], "13333", **_ONE)
case("Conv3DBackpropFilterV2", "13332", [1, 1, 1, 2, 3], "+13333", **_ONE)

_DILATION = {"strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1], "padding": "SAME"}
case("Dilation2D", "b562", "222", **_DILATION)
case("Dilation2DBackpropInput", "b562", "222", "b562", **_DILATION)
case("Dilation2DBackpropInput", "1562", "222", "+1562", **_DILATION)
case("Dilation2DBackpropFilter", "b562", "222", "b562", **_DILATION)
case("Dilation2DBackpropFilter", "1562", "222", "+1562", **_DILATION)


def _dilate_partial(rows, x, filters):
    """A maximum of sums: what looks like a convolution, and is not linear."""
    return call("Conv2D", call("Dilation2D", x, filters, **_DILATION), np.ones((1, 1, 2, 1)), **_VALID)


add("Conv2D", lambda rows, x: _dilate_partial(rows, x, np.ones((2, 2, 2))), ["b562"])

case("BiasAdd", "b3", "3")
case("BiasAdd", "4b3", "3")
case("BiasAdd", "3b", "b")
case("BiasAdd", "b345", "3", data_format="NCHW")
case("BiasAdd", "+34", "+4")
case("BiasAddGrad", "b3")
case("BiasAddGrad", "3b")
case("BiasAddGrad", "b345", data_format="NCHW")
case("BiasAddGrad", "2b34", data_format="NCHW")
case("BiasAddGrad", "+234")
