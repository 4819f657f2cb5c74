"""Losses: how much each sampled token's logprob is pushed. One file per recipe, :mod:`.catalogue`
names them all.

Only REINFORCE Zero (:mod:`.reinforce_zero`) trains; every other file is for study: it says what
a published correction for kernel mismatch or weight lag does beside it (`zm study`).
"""
