"""`hisparse demo`: the whole service on real input, every output token checked against the model library.

plan.py      requests and memory: prompts cut from text files, hot buffers too small for any context   pure
compare.py   each request's tokens against the oracle's, and the one excuse of a difference            pure
report.py    the figures, the verdict, the table                                                   pure
watch.py     latest rows and maxima of requests, workers and pools                                 pure
setup.py     text, checkpoint, and settings of the cluster
scenario.py  submit, retract and resume one request mid-decode, drain one worker with handover     trio
oracles.py   generate() of the model library, in processes that import nothing of hisparse         trio
display.py   live progress on stderr                                                               rich
run.py       checkpoint, service, scenario, oracles, report: in this order                         trio
"""
