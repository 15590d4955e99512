"""Cases of TensorLists. A list is no tensor that a function can return: each case makes one and stacks it again."""

import tensorflow as tf

from tests.rule_cases.table import add, call

_TYPE = {"element_dtype": tf.float64}


def _pushed(rows, x, y):
    empty = call("EmptyTensorList", [rows, 3], -1, **_TYPE)
    return call("TensorListPushBack", call("TensorListPushBack", empty, x), y)


def _stacked(handle, rows):
    return call("TensorListStack", handle, [rows, 3], **_TYPE)


def _from_tensor(rows, x):
    return _stacked(call("TensorListFromTensor", x, [rows, 3]), rows)


def _set_items(rows, x, y):
    reserved = call("TensorListReserve", [rows, 3], 2, **_TYPE)
    return _stacked(call("TensorListSetItem", call("TensorListSetItem", reserved, 0, x), 1, y), rows)


def _get_item(rows, x):
    return call("TensorListGetItem", call("TensorListFromTensor", x, [rows, 3]), 2, [rows, 3], **_TYPE)


def _pop(rows, x, y):
    handle, last = call("TensorListPopBack", _pushed(rows, x, y), [rows, 3], **_TYPE)
    return [_stacked(handle, rows), last]


def _length(rows, x, y):
    handle = _pushed(rows, x, y)
    return [_stacked(handle, rows), call("TensorListLength", handle)]


for _type in ["TensorListFromTensor", "TensorListStack"]:
    add(_type, _from_tensor, ["4b3"], answered=False)
for _type in ["EmptyTensorList", "TensorListPushBack"]:
    add(_type, lambda rows, x, y: _stacked(_pushed(rows, x, y), rows), ["b3", "b3"], answered=False)
for _type in ["TensorListReserve", "TensorListSetItem"]:
    add(_type, _set_items, ["b3", "b3"], answered=False)
add("TensorListGetItem", _get_item, ["4b3"], answered=False)
add("TensorListPopBack", _pop, ["b3", "b3"], answered=False)
add("TensorListLength", _length, ["b3", "b3"], answered=False)


def _product_of_list(rows, x, y):
    """A stacked list has as many elements as it was made of, so it is known not to be broadcast."""
    return call("Mul", call("TensorListStack", call("TensorListFromTensor", x, [3]), [3], **_TYPE), y)


add("Mul", _product_of_list, ["B3", "b3"], answered=False)
