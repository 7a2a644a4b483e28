"""The conformance suite: named cases in groups, one group for each clause of the contract, judged against a candidate."""
