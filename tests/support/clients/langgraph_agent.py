"""langgraph: a graph of a model's node and a tool's node, called twice."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = ChatOpenAI(model="policy", max_tokens=30, max_retries=0).bind_tools([add])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
agent = graph.compile()
question = ("user", "Tom has 3 pens and buys 4. How many?")
first = agent.invoke({"messages": [question]})
second = agent.invoke({"messages": [*first["messages"], ("user", "And then?")]})
assert len(second["messages"]) >= 4
