"""The Newton solver as compiled loops, one instance at a time: what CPU tensors use.

`pairs` answers the inner problem of every state-action pair, `linalg` assembles and solves the Newton system, `solve` is the loop,
`system` what derivatives need of it at a solution, and `threads` shares a batch among threads.
"""
