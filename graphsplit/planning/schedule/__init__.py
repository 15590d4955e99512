"""When what runs on the shards runs.

What enters: the program, what runs where (`steps`, through `flow`), what carries out moves (`transfers`), the mesh, and
the schedule or stages that the user asks for. What leaves: the program with its stages and where each was cut, which
operation goes before another one, phases and turns of shards that share a device, and the schedule that they follow.

`automatic_stages` cuts a program into stages, with `gradient_pairs` and `chains` (what has to stay together).
`recomputation` copies forward operations, to run again before their gradients. `scheduling` orders operations; `phases`
order the shards of a device; `schedules` are the known ones of pipelines, and `pipelines` say which slot of them an
operation belongs to.
"""
