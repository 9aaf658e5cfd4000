"""The ops of the captured ``sample`` segment: contract, reference, launches and cost of each."""
