"""Stream a completion: text in, text out as it is generated.

    python examples/stream_completion.py ipc:///run/hisparse/client.sock "Once upon a time" --max-tokens 100

Over tcp://, name the directory of keys with --keys-dir.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import hisparse


async def complete(client: hisparse.Client, prompt: str, max_tokens: int) -> str:
    """Print the completion of `prompt` as it comes; return how the request ended."""
    tokenizer = await hisparse.fetch_tokenizer(client)  # the service speaks token ids
    text = tokenizer.detokenizer()
    stream = await client.submit(tokenizer.encode(prompt), hisparse.Sampling(max_tokens=max_tokens))
    async for tokens in stream:  # int32[n], each position once and in order
        print(text.push(tokens.tolist()), end="", flush=True)
    ended = stream.ended
    assert ended is not None  # nothing detached the stream
    print(text.finish() + ended.tail_text)
    return f"{ended.request_id} {ended.outcome}: {ended.generated_tokens} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream a completion.")
    parser.add_argument("endpoint")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--keys-dir", type=Path, help="directory with client.key, for tcp:// endpoints")
    options = parser.parse_args()
    key = hisparse.read_peer_key(options.keys_dir, "client") if options.keys_dir else None
    print(
        hisparse.run_client(
            options.endpoint, lambda client: complete(client, options.prompt, options.max_tokens), key=key
        )
    )


if __name__ == "__main__":
    main()
