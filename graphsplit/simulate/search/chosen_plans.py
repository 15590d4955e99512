"""The plan that `memory=` or `plan="auto"` chooses for a traced function, and the variables laid out as it has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from graphsplit.api.calls.chosen_devices import check_no_others
from graphsplit.api.calls.plan_requests import PlanRequest, plan_as_if
from graphsplit.api.layouts.divisions import can_be_parted
from graphsplit.api.layouts.lying_together import slots_in
from graphsplit.api.layouts.new_variables import slots_for_host
from graphsplit.api.layouts.variable_layouts import lay_out, wanted_layouts
from graphsplit.core.device_mesh import LAYOUTS, DeviceMesh, device_mesh
from graphsplit.core.progress import phase
from graphsplit.core.sizes.symbolic_sizes import Size
from graphsplit.core.variables.parted_variables import bytes_of_variable, name_of, parts_of_variable
from graphsplit.errors import UnsupportedError
from graphsplit.planning.plan import Plan
from graphsplit.planning.state import state_of
from graphsplit.simulate.search.automatic import AS_THEY_ARE, choose, machine_like, table_for
from graphsplit.simulate.search.candidates import Candidate
from graphsplit.simulate.search.mesh_layouts import Variable
from graphsplit.simulate.search.plan_search import Choice
from graphsplit.simulate.search.question import Question
from graphsplit.tracing.trace import Trace, captured_variables


@dataclass(frozen=True, eq=False)
class ChosenPlans:
    """Chooses plans of a traced function.

    Attributes:
      request: what is to be planned.
    """

    request: PlanRequest

    def choose(self, before: Choice | None) -> Choice:
        """Return the fastest plan that fits, for variables that lie anyhow or are yet to be laid out.

        Args:
          before: what ran last, which may fit here, too.
        """
        trace, options, devices = self.request.trace, self.request.options, self.request.devices
        rows = self.request.splitting.batch
        if isinstance(rows, Size):
            raise UnsupportedError(
                f"{options.asks_for_plan} predicts the time of a step, and the size of the batch is not known. Call "
                "it with tensors of known shapes, without an input_signature or reduce_retracing."
            )
        laid = [variable for variable in trace.variables if parts_of_variable(variable) is not None]
        lying = {device for variable in laid if (parts := parts_of_variable(variable)) for device in parts.devices}
        fewest = max([devices.index(device) + 1 for device in lying if device in devices], default=1)
        machine = machine_like(options.machine, devices)
        sizes: dict[str, int] = {}
        for variable in () if laid and before is not None else trace.variables:  # (a layout is chosen once)
            if parts_of_variable(variable) is None:
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
            return choose(question, before)

    def _plan_of(self, devices: Sequence[str], candidate: Candidate) -> Plan:
        """Return the plan of a candidate, as if the variables lay so."""
        options = replace(self.request.options.as_given(), **candidate.options)
        check_no_others(self.request.trace.program, options)
        layout = None if candidate.layout == AS_THEY_ARE else candidate.layouts
        return plan_as_if(self.request.as_if(options, devices), layout, keep=True)

    def as_if(self, choice: Choice) -> Plan:
        """Return the plan that was chosen; no variable moves."""
        plan = self._plan_of(self.request.devices[: choice.chosen.devices], choice.chosen)
        return replace(plan, notes=(*plan.notes, *choice.notes))

    def laid_out(self, choice: Choice) -> Plan:
        """Return the plan that was chosen, and lay the variables out as it has them."""
        chosen, devices = choice.chosen, self.request.devices[: choice.chosen.devices]
        options = replace(self.request.options.as_given(), **chosen.options)
        mesh = None if options.mesh.is_of_rows else device_mesh(options.mesh, devices)
        if self.request.trace.variables and chosen.layout != AS_THEY_ARE and (chosen.devices > 1 or chosen.others):
            self._lay_out(chosen, devices if mesh is None else mesh.devices, mesh)
        request = replace(self.request, options=options, devices=devices, home=devices[0], mesh=mesh).in_stages()
        plan = request.plan(state_of(request.trace))
        return replace(plan, notes=(*plan.notes, *choice.notes))

    def _lay_out(self, chosen: Candidate, devices: Sequence[str], mesh: DeviceMesh | None) -> None:
        """Lay out the variables of the function, and their slots, as a plan has them.

        Raises:
          UnsupportedError: if some would have to move while a graph is built.
        """
        variables, slots = list(self.request.trace.variables), slots_in(self.request.trace)
        wanted = wanted_layouts(variables, chosen.layouts, slots, mesh)
        kept = [None if parts_of_variable(v) is not None else own for v, own in zip(variables, wanted, strict=True)]
        if tf.executing_eagerly():
            lay_out(variables, kept, slots, devices, mesh)
        elif any(own not in (None, "home") for own in kept):
            raise UnsupportedError(
                f"{self.request.options.asks_for_plan} lays variables out at the first call, {chosen}, and this one is "
                "in a tf.function, while a graph is built. Call the function once outside before, or lay them out by "
                "set_variable_layout."
            )


def variables_to_cut(trace: Trace) -> list[Variable]:
    """Return the variables of a traced function that may be cut, each with its slots, which lie as it does."""
    slots = slots_in(trace)
    owners: dict[int, tf.Variable] = {}
    captures: dict[int, list[int]] = {}  # (what a gradient reads by itself is captured once more)
    for position, own in captured_variables(trace).items():
        head = slots.get(id(own), own)
        if head.shape == own.shape and own.shape.rank and can_be_parted(own):
            owners.setdefault(id(head), head)
            captures.setdefault(id(head), []).append(position)
    slot_bytes = Counter[int]()
    for own in trace.variables:
        if (head := slots.get(id(own))) is not None:
            slot_bytes[id(head)] += bytes_of_variable(own)
    names = Counter(map(name_of, trace.variables))
    found = [
        Variable(name_of(own), tuple(own.shape.as_list()), bytes_of_variable(own), tuple(captures[k]), slot_bytes[k])
        for k, own in owners.items()
    ]
    return [own for own in found if names[own.name] == 1]  # (two of one name cannot lie differently)
