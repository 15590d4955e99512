"""What all other folders share: devices, protos of graphs, layouts, sizes, files, and variables in parts.

What enters: names of devices, protos, integers, paths, variables. What leaves: the same in one form, checked. Nothing
here knows programs or plans.
"""
