"""A plan in words.

What enters: a plan. What leaves: text for people; nothing is decided.

`plan_text` is the whole plan. `headlines` is its first line, with how much of the work runs where (`Shares`);
`held_text` is what each device holds; `sections` are about stages and kernels; `advice` says what to do about work that
stays on one device; `plan_comparison` says what is different in another plan.
"""
