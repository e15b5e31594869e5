"""The Newton solver as compiled loops, one instance at a time: what CPU tensors use.

`pairs` answers the inner problem of every state-action pair, `linalg` assembles and solves the Newton system, `solve` is the loop,
`derivatives` the implicit function theorem in both directions, and `threads` shares a batch among threads.
"""
