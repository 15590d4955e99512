"""Search: the fastest plan that fits into the memory of each device.

What enters is a `Question`: a traced function, a machine, the bytes that each device may hold, the table of what may
differ between plans, and a function that makes a plan of a candidate. What leaves is a `Choice`: the winner, and what
is known of the others; or an error that says what the smallest of them holds, of what that consists, and what helps.
"""
