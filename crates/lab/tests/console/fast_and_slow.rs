//! The emulator's options for a machine of two nodes.

/// A fast node with both CPUs, and a slow one.
pub const FAST_AND_SLOW: &str = "-machine pc,hmat=on -smp 2 -m 832M \
    -object memory-backend-memfd,id=m0,size=384M,share=on -object memory-backend-memfd,id=m1,size=448M,share=on \
    -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,memdev=m1,initiator=0 \
    -numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-latency,latency=80 \
    -numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-bandwidth,bandwidth=100G \
    -numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-latency,latency=250 \
    -numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-bandwidth,bandwidth=20G";
