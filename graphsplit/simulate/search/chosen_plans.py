"""The plan that `memory=` or `plan="auto"` chooses for a traced function, and the variables laid out as it has them.

`choose` says what is compared, and by which machine. If nothing fits, `refuse` says what comes closest, what takes the
bytes, and what would help most.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import tensorflow as tf

from graphsplit.api.calls.chosen_devices import check_no_others
from graphsplit.api.calls.plan_requests import PlanRequest
from graphsplit.api.layouts.divisions import can_be_parted
from graphsplit.api.layouts.learned_layouts import slots_in
from graphsplit.api.layouts.new_variables import slots_for_host
from graphsplit.api.layouts.variable_layouts import decide, wanted_layouts
from graphsplit.api.options import Options
from graphsplit.core.device_mesh import LAYOUTS, device_mesh
from graphsplit.core.progress import phase
from graphsplit.core.sizes import Size
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.core.variables.parted_variables import bytes_of_variable, name_of
from graphsplit.errors import ArgumentError, UnsupportedError, bullet_list
from graphsplit.planning.amounts import count_text, format_bytes
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.costs.machine_files import known_machines
from graphsplit.planning.plan import Plan
from graphsplit.simulate.search.candidates import (
    Candidate,
    Table,
    counts_of_devices,
    large_names,
    meshes_of,
    savings_left_open,
)
from graphsplit.simulate.search.mesh_layouts import Variable
from graphsplit.simulate.search.plan_search import Choice, Looked, Question, Search
from graphsplit.tracing.trace import Trace, captured_variables


@dataclass(frozen=True, eq=False)
class ChosenPlans:
    """Chooses plans of a traced function.

    Attributes:
      request: what is to be planned.
    """

    request: PlanRequest

    def choose(self, last_choice: Choice | None) -> Choice:
        """Return the fastest plan that fits, for variables that lie anyhow or are yet to be laid out.

        Args:
          last_choice: what ran last, which may fit here, too.
        """
        trace, options, devices = self.request.traced, self.request.options, self.request.devices
        rows = self.request.splitting.batch
        if isinstance(rows, Size):
            raise UnsupportedError(
                f"{options.asks_for_plan} predicts the time of a step, and the size of the batch is not known. Call "
                "it with tensors of known shapes, without an input_signature or reduce_retracing."
            )
        laid = [record.division for v in trace.variables if (record := self.request.lies.of(v)).division is not None]
        lying = {device for division in laid for device in division.devices}
        fewest = max([devices.index(device) + 1 for device in lying if device in devices], default=1)
        machine = machine_like(options.machine, devices)
        sizes: dict[str, int] = {}
        for variable in () if laid and last_choice is not None else trace.variables:  # (a layout is chosen once)
            if self.request.lies.of(variable).division is None:
                name = name_of(variable)
                sizes[name] = sizes.get(name, 0) + bytes_of_variable(variable)
        limit = options.memory or machine.device.memory_bytes
        slots = slots_for_host(trace.variables) if machine.device.kind == "GPU" else ()  # (CPUs have the host's memory)
        table = table_for(options, rows, len(devices), fewest, sizes, slots)
        if trace.program.all_stages() or (laid and options.mesh.is_of_rows):  # whose devices are other ones
            table = replace(table, meshes=())
        cuttable = variables_to_cut(trace) if table.meshes and table.layouts == LAYOUTS else []
        question = Question(
            "The function", rows, list(sizes.values()), machine, limit, table, self._plan_of, trace.program, cuttable
        )
        with phase("choosing a plan"):
            return choose(question, last_choice)

    def _plan_of(self, devices: Sequence[str], candidate: Candidate) -> Plan:
        return self._planned_as(devices, candidate)[0]

    def _planned_as(self, devices: Sequence[str], candidate: Candidate) -> tuple[Plan, Arrangement]:
        """Return the plan of a candidate for devices that need not exist, and how variables would lie on them."""
        options = replace(self.request.options.as_given(), **candidate.options)
        check_no_others(self.request.program, options)
        layout = None if candidate.layout == AS_THEY_ARE else candidate.layouts
        return self.request.as_if(options, devices, layout, keep=True).planned(lambda: None)

    def laid_out(self, choice: Choice) -> tuple[Plan, Arrangement]:
        """Return the plan that was chosen, and how the variables are to lie for it."""
        chosen, devices, request = choice.chosen, self.request.devices[: choice.chosen.devices], self.request
        if request.lies.default_device:  # (the devices are not here)
            plan, lies = self._planned_as(devices, chosen)
            return replace(plan, notes=(*plan.notes, *choice.notes)), lies
        options, lies = replace(request.options.as_given(), **chosen.options), request.lies.copy()
        mesh = None if options.mesh.is_of_rows else device_mesh(options.mesh, devices)
        if request.traced.variables and chosen.layout != AS_THEY_ARE and (chosen.devices > 1 or chosen.exceptions):
            variables, slots = list(request.traced.variables), slots_in(request.traced)
            wanted = wanted_layouts(variables, chosen.layouts, slots, mesh)
            new_layouts = [
                layout if lies.of(v).division is None else None for v, layout in zip(variables, wanted, strict=True)
            ]
            decide(lies, variables, new_layouts, slots, devices if mesh is None else mesh.devices, mesh)
            lies.reason = request.options.asks_for_plan
        request = replace(
            request, options=options, devices=devices, default_device=devices[0], mesh=mesh, lies=lies
        ).in_stages()
        plan = request.plan()
        return replace(plan, notes=(*plan.notes, *choice.notes)), lies


def variables_to_cut(trace: Trace) -> list[Variable]:
    """Return the variables of a traced function that may be cut, each with its slots, which lie as it does."""
    slots = slots_in(trace)
    owners: dict[int, tf.Variable] = {}
    captures: dict[int, list[int]] = {}  # (what a gradient reads by itself is captured once more)
    for position, variable in captured_variables(trace).items():
        head = slots.get(id(variable), variable)
        if head.shape == variable.shape and variable.shape.rank and can_be_parted(variable):
            owners.setdefault(id(head), head)
            captures.setdefault(id(head), []).append(position)
    slot_bytes = Counter[int]()
    for variable in trace.variables:
        if (head := slots.get(id(variable))) is not None:
            slot_bytes[id(head)] += bytes_of_variable(variable)
    names = Counter(map(name_of, trace.variables))
    cuttable = [
        Variable(
            name_of(variable),
            tuple(variable.shape.as_list()),
            bytes_of_variable(variable),
            tuple(captures[k]),
            slot_bytes[k],
        )
        for k, variable in owners.items()
    ]
    return [variable for variable in cuttable if names[variable.name] == 1]  # (two of one name cannot lie differently)


AS_THEY_ARE = "as they are"


def choose(question: Question, last_choice: Choice | None = None) -> Choice:
    """Return the fastest plan that fits; the one that ran before, for other sizes, if it fits here, too.

    Raises:
      ArgumentError: if nothing fits: with what comes closest, and what would help.
    """
    search = Search(question)
    choice = (last_choice and search.again(last_choice.chosen)) or search.run()
    if choice is None:
        refuse(search)
    return choice


def table_for(
    options: Options,
    rows: int,
    devices: int,
    fewest: int,
    sizes: Mapping[str, int],
    slots: Sequence[str] = (),
) -> Table:
    """Return what may differ between plans.

    Args:
      options: those that the function has.
      rows: of the batch.
      devices: how many there are.
      fewest: the smallest number of devices: those on which variables lie.
      sizes: bytes of the variables that may be laid out, by name; nothing, if they lie in parts already.
      slots: those that may be on the host of the devices, if it has a memory of its own.
    """
    mesh = options.mesh
    savings = savings_left_open(options, -(-rows // (devices if mesh.is_of_rows else mesh.rows)))
    layouts = LAYOUTS if sizes and options.lays_out else (AS_THEY_ARE,)
    if not mesh.is_of_rows:
        return Table((devices,), layouts, savings, meshes=(mesh,), is_on_mesh=True)
    if options.stages is not None:
        return Table((devices,), layouts, savings)
    may_be = layouts == LAYOUTS and not options.jit_compile
    meshes, host_slots = meshes_of(devices, rows) if may_be else (), tuple(slots) if layouts == LAYOUTS else ()
    if options.plan is None:
        return Table((devices,), layouts, savings, meshes=meshes, slots=host_slots)
    stages = tuple([count for count in dict.fromkeys((devices, 2)) if count > 1 and devices % count == 0])
    large = large_names(sizes) if options.lays_out else ()
    return Table(counts_of_devices(fewest, devices), layouts, savings, stages, large, meshes, slots=host_slots)


def machine_like(named: Machine | None, devices: Sequence[str]) -> Machine:
    """Return the machine by which speed is predicted: the one that is named, or the one that looks like this one.

    Raises:
      UnsupportedError: for GPUs that no machine file describes.
      ArgumentError: for a machine of another kind than the devices.
    """
    kind = devices[0].rpartition("device:")[2].partition(":")[0]
    if named is not None:
        machine = named
    elif kind == "CPU":
        cpu_machine = known_machines()["cpu"]
        machine = replace(cpu_machine, host=replace(cpu_machine.host, threads=os.cpu_count() or 1))
    else:
        machine = _gpu_machine()
    if machine.device.kind != kind:
        raise ArgumentError(
            f"plan={machine.name!r}: the machine has {machine.device.kind} devices, but the function runs on "
            f"{devices[0]!r}. Name a machine of that kind, or other devices."
        )
    return replace(machine, devices=max(machine.devices, len(devices)))


def _gpu_machine() -> Machine:
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise ArgumentError(
            "The search for a plan predicts speed, and this process has none of the GPUs that the function runs on. "
            "Name the machine that has them: plan='8xA100-SXM4-80GB'; `graphsplit machines` lists all."
        )
    details = tf.config.experimental.get_device_details(gpus[0])
    model = str(details.get("device_name", "GPU"))
    machine = machine_of_gpu(model)
    if machine is not None:
        return machine
    raise UnsupportedError(
        f"The search for a plan predicts speed, and no machine file describes {model!r}. Write one by "
        "`graphsplit calibrate -o here.toml`, and name it: plan='here.toml'."
    )


def machine_of_gpu(model: str) -> Machine | None:
    """Return the machine with a model of GPU, as the driver calls that; of several variants the most like it.

    >>> machine_of_gpu("NVIDIA A100-SXM4-80GB").device.name
    'A100-SXM4-80GB'
    """
    words = re.split(r"[\s-]", model)
    named = [(machine.device.name.split("-"), machine) for machine in known_machines().values()]
    alike = [(sum(part in words for part in parts), machine) for parts, machine in named if parts[0] in words]
    return max(alike, key=lambda pair: pair[0])[1] if alike else None


_LARGEST = 3
_MOST_TIMES = 8  # as many devices as there are: more are not tried


def refuse(search: Search) -> NoReturn:
    """Raise the error of a search in which nothing fits."""
    question = search.question
    count = len(search.looked)
    planned = {candidate: looked for candidate, looked in search.looked.items() if looked.step_s < math.inf}
    least = min(planned, key=lambda candidate: planned[candidate].peak_bytes)
    smallest = planned[least]
    limit, devices = format_bytes(int(question.limit)), count_text(question.table.devices[0], "device")
    plain = min(planned, key=lambda candidate: (bool(candidate.mesh), planned[candidate].peak_bytes))
    helps = [
        _of_largest_part(search, smallest),
        _of_more_devices(search, plain),
    ]  # (large meshes are slow)
    raise ArgumentError(
        f"{question.title} does not fit: each device may hold {limit}. Of {count_text(count, 'plan')} for up to "
        f"{devices} the smallest, {least}, needs {format_bytes(smallest.peak_bytes)} on its fullest device:\n"
        f"{bullet_list(_parts(smallest))}\nWhat would help most:\n{bullet_list([text for text in helps if text])}"
    )


def _parts(looked: Looked) -> list[str]:
    """Return of what the bytes of the fullest device consist, the most first."""
    memory = looked.fullest
    alive = "activations and received tensors"
    if memory.largest:
        named = ", ".join(f"{name!r} {format_bytes(size)}" for name, size in memory.largest[:_LARGEST])
        alive = f"{alive}: {named}, ..."
    pairs = [(memory.state_bytes, "variables"), (memory.argument_bytes, "arguments"), (memory.live_bytes, alive)]
    return [f"{format_bytes(size)} {what}" for size, what in sorted(pairs, key=lambda pair: -pair[0]) if size]


def _of_largest_part(search: Search, looked: Looked) -> str:
    """Return what makes the largest part smaller."""
    memory, question = looked.fullest, search.question
    grows = memory.live_bytes + memory.argument_bytes
    if memory.state_bytes > min(grows, question.limit):
        is_tried = any(candidate.layout == "sharded" for candidate in search.looked)
        or_sharded = "" if is_tried else ", or sharded variables: set_variable_layout(..., 'sharded')"
        return f"smaller variables: of lower precision, or with an optimizer of fewer slots{or_sharded}"
    rows = int(question.rows * max(question.limit - memory.state_bytes, 0) / grows) if grows else 0
    return (
        f"a smaller batch: at most {count_text(rows, 'row')} instead of {question.rows}" if rows else "smaller layers"
    )


def _of_more_devices(search: Search, least: Candidate) -> str:
    """Return the smallest number of devices that would do, found by doubling and then by halving; "" for none."""
    question, columns = search.question, least.columns
    few = many = question.table.devices[0] // columns
    least = replace(least, layout=question.table.layouts[-1], stages=1, exceptions=())
    while True:
        few, many = many, 2 * many
        is_there = question.machine.network is not None or many * columns <= question.machine.most_devices
        if many * columns > _MOST_TIMES * question.table.devices[0] or not is_there:
            return ""
        if _would(search, least, many):
            break
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if _would(search, least, middle) else (middle, many)
    enough = least.with_rows(many)
    return f"{many * columns} devices: {enough}, {format_bytes(search.looked[enough].peak_bytes)} on each"


def _would(search: Search, least: Candidate, rows: int) -> bool:
    """Return whether so many devices, or rows of a mesh, would do; of n times as many each holds 1/n of the state."""
    larger = least.with_rows(rows)
    if search.look_at(least).fullest.state_bytes * least.devices / larger.devices > search.question.limit:
        return False
    return search.fits(larger)
