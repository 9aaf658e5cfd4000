"""`openinfer explain`: a step op by op, and the outline and ledger of ops that bench, plan and tune share."""
