"""Published figures that cannot be compared, because what they depend on was not published."""

MISSING = (
    ("Goyal et al., ResNet-50 on 256 P100", "about 90 % from 8 to 256", "images/s of one server, the network's rate"),
    ("ChainerMN, ResNet-50 on 128 GPUs", "90 %", "images/s of one GPU; which network"),
    ("ChainerMN, ResNet-50 on 1024 P100", "90 epochs in 15 minutes", "images/s of one GPU; which network"),
    ("Fujitsu, ResNet-50 on 2,048 GPUs", "1.73 M images/s", "images/s of one GPU with its share of the batch"),
    ("AWS, ResNet-50 on 64 V100", "about 50 minutes", "images/s of one GPU with its share of the batch"),
    (
        "MXNet and NV-Caffe, GoogLeNet on P100 (Dell)",
        "220 to 2955 images/s on 1 to 16",
        "the batch and the network's rate; the report says that reading images was slow",
    ),
    ("S-Caffe, GoogLeNet on 160 K80", "2.5 times 32 GPUs", "seconds of one GPU, the batch, the network's rate"),
    ("FireCaffe, GoogLeNet and NiN on 128 GPUs", "47 and 39 times", "seconds of one GPU, the network's rate"),
    ("BigDL, Inception-v1 on 96 nodes", "5.3 times 16 nodes", "seconds of a node, and of a task of Spark"),
    ("HyPar-Flow, ResNet-1001", "110 times on 128, 481 on 512 nodes", "seconds of a node; how many partitions"),
    (
        "DistBelief, fully and locally connected",
        "2.2 times at 8, 12 times at 81",
        "widths of the layers, seconds of a machine",
    ),
    ("PipeDream, AWD LM and S2VT", "straight and 2-1-1; 4.25 and 3.01 times", "profiles of the two"),
    (
        "PipeDream, Inception-v3 in 2018",
        "1.45 times, 47 % less sent",
        "where it is cut",
    ),
    ("PipeDream, time to accuracy", "2.46 to 5.28 times", "epochs that each needs: a simulator has no accuracy"),
    (
        "PipeDream, GNMT on 12 and 16 devices",
        "2.34 to 3.14 times",
        "stages of the straight jobs, some of them idle",
    ),
    ("PipeDream in 2018, Titan X", "1.47 to 9.86 times one device", "seconds of layers on that device"),
    ("torchgpipe, AmoebaNet-D", "20.3 to 34.4 samples/s; sizes", "work and activations of each cell"),
    ("ZeRO, throughput", "38 Tflop/s per GPU at 100 B", "shapes, batches and microbatches of its runs"),
    ("FlexFlow, six models", "1.3 to 3.3 times", "seconds of operators, and the strategies that were found"),
    ("DDP, seconds of a step", "near-linear to 256 GPUs", "seconds of one GPU, the batch, the network's rate"),
    ("Horovod, tensor fusion", "up to 65 %", "what one call costs for each tensor"),
    (
        "torchtitan, Llama 3.1 70B and 405B on H100",
        "829 and 876, 100 and 128 tokens/s/GPU",
        "microbatches of the pipelines; how much asynchronous tensor parallelism hides",
    ),
    ("NeMo, Llama 3 8B in float8", "12,273 tokens/s/GPU", "which operations are in float8; the plan of the run"),
    (
        "Megatron-LM, 39 B to 1 T parameters on A100",
        "138 to 163 TFLOP/s/GPU",
        "microbatches, and chunks of the interleaved schedule, of each row",
    ),
    ("GPipe, largest models", "1.8 B on 8, 83.9 B on 128 partitions", "activations of the layers as compiled for TPUs"),
)
