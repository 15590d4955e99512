"""From a program to a plan.

What enters: a program, layouts of its arguments, where its variables are, and options. What leaves: a plan, which says
where each operation runs and what is sent. `planner` lists the passes in order. Nothing here makes a node.
"""
