mod data;
mod data_chat;
