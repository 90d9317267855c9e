//! Data; losses, gradients, optimizer and trainer on a toy model whose answers can be computed by hand or in one graph.

mod cases;
mod data;
mod data_chat;
mod device;
mod finetune;
mod in_backward;
mod learner;
mod optimizer;
mod step;
mod toy;
mod trainer;
