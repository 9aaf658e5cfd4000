"""Log-probabilities of the Qwen3 engine: beside requests that ask for none, equal to the model's own."""

import numpy as np


def test_logprobs_beside_requests_without(tiny, session):
    run = session(tiny.path, max_num_seqs=4)
    prompt = tiny.prompt(2)
    asked = run.submit(prompt, 6, ignore_eos=True, logprobs=3)
    silent = run.submit(tiny.prompt(1), 12, ignore_eos=True)
    chosen_only = run.submit(tiny.prompt(3), 4, ignore_eos=True, logprobs=0)
    run.finish()
    assert run.outcomes[silent].logprobs == [None] * 12
    assert [one.top_token_ids for one in run.outcomes[chosen_only].logprobs] == [[]] * 4
    logits = tiny.numbers["p2.logits_fp32"][-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    first = run.outcomes[asked].logprobs[0]
    assert first.top_token_ids == np.argsort(-logits)[:3].tolist()
    np.testing.assert_allclose(first.top_logprobs, expected[first.top_token_ids], atol=1e-3)
    for token, one in zip(run.outcomes[asked].tokens, run.outcomes[asked].logprobs, strict=True):
        assert one.top_token_ids[0] == token  # greedy
        assert one.logprob == one.top_logprobs[0]
        assert one.top_logprobs == sorted(one.top_logprobs, reverse=True)
