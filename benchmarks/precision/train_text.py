"""Train the job text on one rank in one precision, and print the bits per byte of held-out text as JSON."""

import json
import sys

import torch
from wide_products import find_slow_dtypes, replace_products

from counterpoint.jobs.registry import JOBS
from counterpoint.training.trainer import Trainer

WEIGHTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(precision, weights, max_steps):
    """Run one training."""
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(False)  # attention is made of products, which may be replaced
    slow = find_slow_dtypes()
    library = replace_products(slow)
    job = JOBS["text"]
    data, held_out = job.build_data()
    model = job.build_model(0).to(WEIGHTS[weights])
    trainer = Trainer(
        model,
        loss=job.loss,
        optimizer=job.optimizer,
        strategy="solo",
        precision=None if precision == "none" else precision,
        progress="off",
    )
    result = trainer.fit(data, batch_size=job.batch_size, epochs=1, max_steps=max_steps)
    scores = trainer.evaluate(held_out, batch_size=job.batch_size, metrics=job.metrics)
    skipped = sum(loss != loss for loss in result.losses)
    del library  # kept until here
    print(
        json.dumps(
            {
                "bits": scores["bits_per_byte"],
                "losses": result.losses,
                "skipped": skipped,
                "replaced_products": sorted(map(str, slow)),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
